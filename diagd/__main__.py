"""Run the command line as `python -m diagd`."""

from diagd.cli import main

if __name__ == "__main__":
    main()
