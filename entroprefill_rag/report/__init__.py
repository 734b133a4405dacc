"""A record for people: as text in the terminal."""
