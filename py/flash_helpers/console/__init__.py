"""How every command prints, writes files, says errors and ends."""
