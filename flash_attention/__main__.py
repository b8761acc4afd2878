"""``python -m flash_attention``: the command line of the library."""

from flash_helpers.cli import main

if __name__ == "__main__":
    main()
