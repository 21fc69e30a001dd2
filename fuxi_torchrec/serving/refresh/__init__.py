"""A new export from an old one and the events since."""
