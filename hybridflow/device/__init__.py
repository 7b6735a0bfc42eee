"""Device abstraction, and movement of model parts on and off the device.

The only package that uses `torch.cuda`.
"""
