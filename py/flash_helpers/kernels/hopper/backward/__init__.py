"""The backward pass of the Hopper family."""
