"""Process management: startup and shutdown, rendezvous, and text exchange outside the training
collectives.
"""
