"""`%%ondevice`: a cell on a device, and what it copied."""
