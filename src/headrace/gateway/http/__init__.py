"""HTTP surfaces. One module for each API family."""
