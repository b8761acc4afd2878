"""Entry points into other libraries. None of them is imported by ``flash_attention``."""
