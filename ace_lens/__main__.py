"""`python -m ace_lens` is the command `ace-lens`."""

from ace_lens.cli import main

if __name__ == "__main__":
    main()
