"""Which tokens the next step computes. Pure: no I/O, no clock, no device."""
