"""Start the Python workers of a Spark on this machine, so that a small task costs little.

Spark's workers import pyspark from a zip, and their path also has one of Spark's jars. At the beginning of each task
Python 3.11 reads the directories of both again, once for each package imported from them: 0.2 s of CPU. This module is
Spark's `spark.python.daemon.module`. It makes the workers import the installed pyspark, which has the same content.
"""

import os
import sys

if __name__ == "__main__":
    inside = f"{os.environ['SPARK_HOME']}{os.sep}"
    sys.path[:] = [place for place in sys.path if not place.startswith(inside)]
    sys.path_importer_cache.clear()

    from pyspark.daemon import manager

    manager()
