"""The shared vocabulary: wire structs, states, errors, ports. Pure: no I/O, no clock, no numpy. Imports nothing of Headrace."""
