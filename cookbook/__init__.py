"""Recipes: patterns of agents over shared states, each one file to read and to run.

Nothing here is imported by the packages; a recipe uses the SDK and nothing else.
"""
