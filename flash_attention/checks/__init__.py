"""What is refused before anything runs."""
