"""Hadoop's local file system without a process for each file: Java itself sets the permissions.

Hadoop starts `chmod` for each file and folder that it creates, unless its native library is installed. The class below
sets the permissions in Java. It is compiled in the running JVM, by the compiler that Spark brings for its generated
code, and takes the place of the local file system in Hadoop's cache. The processes that tests start have Hadoop's own.
"""

from __future__ import annotations

from typing import Any

from pyspark.sql import SparkSession

CLASS = "LocalFilesWithoutProcesses"
SOURCE = f"""
import java.nio.file.Files;
import java.nio.file.attribute.PosixFilePermissions;
import org.apache.hadoop.fs.LocalFileSystem;
import org.apache.hadoop.fs.Path;
import org.apache.hadoop.fs.RawLocalFileSystem;
import org.apache.hadoop.fs.permission.FsPermission;

public class {CLASS} extends LocalFileSystem {{
    public {CLASS}() {{
        super(new Raw());
    }}

    public static class Raw extends RawLocalFileSystem {{
        public void setPermission(Path path, FsPermission permission) throws java.io.IOException {{
            if (permission.getStickyBit()) {{
                super.setPermission(path, permission);
            }} else {{
                Files.setPosixFilePermissions(
                    pathToFile(path).toPath(), PosixFilePermissions.fromString(permission.toString()));
            }}
        }}
    }}
}}
"""


def set_permissions_in_java(spark: SparkSession) -> None:
    """Make the session's JVM create local files without starting processes."""
    jvm: Any = spark._jvm
    hadoop, files = jvm.org.apache.hadoop, jvm.java.net.URI.create("file:///")
    configuration = spark._jsc.hadoopConfiguration()
    compiler = jvm.org.codehaus.janino.SimpleCompiler()
    compiler.cook(SOURCE)
    system = hadoop.util.ReflectionUtils.newInstance(
        compiler.getClassLoader().loadClass(CLASS), configuration
    )
    system.initialize(files, configuration)
    # Every configuration finds the cached instance, also one that can't load a class compiled at run time.
    base = jvm.java.lang.Class.forName("org.apache.hadoop.fs.FileSystem")
    types = _array(spark, jvm.java.lang.Class, files.getClass(), configuration.getClass(), base)
    put = base.getDeclaredMethod("addFileSystemForTesting", types)
    put.setAccessible(True)
    put.invoke(None, _array(spark, jvm.java.lang.Object, files, configuration, system))


def _array(spark: SparkSession, element: Any, *values: Any) -> Any:
    gateway: Any = spark.sparkContext._gateway
    array = gateway.new_array(element, len(values))
    for place, value in enumerate(values):
        array[place] = value
    return array
