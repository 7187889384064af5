"""Donors in stores: reads in the background, writes in the background, and what is promoted into memory."""
