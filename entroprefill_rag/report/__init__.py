"""A record as text in the terminal."""
