"""The Python face of device ``foo``, installed as ``torch.foo``."""
