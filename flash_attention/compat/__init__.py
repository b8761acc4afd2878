"""Calls under the names and with the meanings of other libraries."""
