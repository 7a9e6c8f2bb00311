"""Op library: importing registers every raw op; nothing here queries a GPU."""
