"""anabranch on the server: states, their contexts, and the extension of SGLang that computes them.

Only `engine/` imports SGLang or torch; everything else is plain Python that can be read and tested without them.
"""
