"""Where operators run: in processes of this machine, or on Ray."""
