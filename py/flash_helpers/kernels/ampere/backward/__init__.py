"""The backward pass of the Ampere family."""
