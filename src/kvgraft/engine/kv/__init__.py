"""The K/V of requests, prefixes and donors: slots, windows, sessions, grafts, and the host tier."""
