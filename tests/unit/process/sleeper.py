"""A program that does nothing for ten minutes."""

import time

if __name__ == "__main__":
    time.sleep(600)
