"""The files for spark-submit.

In a directory of its own, as Python puts a script's directory first on its path.
"""
