"""The engine: everything that touches SGLang. README.md beside this file lists every name touched, and why.

`hooks.py` is the list of seams, `v0_5_17.py` what is peculiar to one SGLang version; the rest is ours.
"""
