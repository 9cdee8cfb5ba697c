"""The placement algorithms: pure numpy functions of loads, slots and time given as arguments."""
