"""Graph passes of the backend."""
