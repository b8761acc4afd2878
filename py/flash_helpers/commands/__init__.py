"""The commands that are no measurement: each a plain function that returns what its table shows."""
