"""Device abstraction and offloading of model parts. This is the only package that uses
`torch.cuda`."""
