"""Measured times: the database of this machine and the tables that ship."""
