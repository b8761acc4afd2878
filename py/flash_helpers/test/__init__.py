"""Inputs, references and measures for tests. Imports torch."""
