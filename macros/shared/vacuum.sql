{#- A vacuum below the retention of its table. -#}

{% macro require_no_retention(relation, what) %}
    {#-
        Delta refuses a vacuum below the table's own retention, unless a setting of the session switches that check off.
        No macro of ours changes the setting: after a statement that fails nothing runs that would switch it on again.
        The user decides, by the property of one table or by the setting of his session.
    -#}
    {%- set property = 'delta.deletedFileRetentionDuration' -%}
    {%- set check = 'spark.databricks.delta.retentionDurationCheck.enabled' -%}
    {%- set retention = lakehouse_patterns.table_property(relation, property) or 'interval 1 week' -%}
    {%- do lakehouse_patterns.require(
        modules.re.fullmatch('(?i)(interval\\s+)?(0+\\s+[a-z]+\\s*)+', retention.strip())
        or run_query('set ' ~ check).rows[0][1] == 'false',
        what ~ ' removes the files of all older versions, but ' ~ relation ~ ' keeps them: its ' ~ property ~ ' is '
        ~ retention ~ "; if no reader, stream or open write needs them, set the property to 'interval 0 hours' in the "
        ~ "model's tblproperties, and with ALTER TABLE for a table that is not rebuilt"
    ) -%}
{% endmacro %}
