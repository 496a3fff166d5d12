"""`python -m weft.cli`: the command line as a module, for launchers that start modules."""

from weft.cli import main

if __name__ == "__main__":
    main()
