"""From a checked call to its launch."""
