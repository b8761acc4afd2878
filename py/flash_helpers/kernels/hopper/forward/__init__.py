"""The forward pass of the Hopper family as data."""
