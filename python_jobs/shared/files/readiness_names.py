"""What producers and consumers of readiness agree on; imported without Spark by those who only wait."""

MARKER = "_READY"
"""The file that makes a folder ready."""
CHANGES = "_changes"
"""The dataset's folder of notices about closed partitions that were recreated."""
UPKEEP = (
    "OPTIMIZE", "REORG", "VACUUM START", "VACUUM END", "SET TBLPROPERTIES", "UNSET TBLPROPERTIES", "CHANGE COLUMN",
    "ADD CONSTRAINT", "DROP CONSTRAINT", "UPGRADE PROTOCOL", "COMPUTE STATS",
)  # fmt: skip
"""Operations of Delta commits that change no row."""
