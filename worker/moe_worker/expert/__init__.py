"""Experts of this rank and their traffic: routing, exchange, slots, load counters, migration."""
