"""What is measured, against which baseline, and the results as they were. Not part of the package."""
