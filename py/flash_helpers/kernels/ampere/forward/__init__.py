"""The forward pass of the Ampere family as data."""
