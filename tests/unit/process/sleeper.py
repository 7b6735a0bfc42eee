"""A program that does nothing for a minute."""

import time

if __name__ == "__main__":
    time.sleep(60)
