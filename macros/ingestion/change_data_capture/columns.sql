{#- The columns that a user declares: their names, types and options, checked while the model is compiled. -#}

{% macro _cdc_own_columns() %}
    {{ return([
        'record', 'ingested_at', 'op', 'lsn', 'transaction_id', 'transaction_order', 'changed_at', 'is_deleted',
        'error_class', 'error_message'
    ]) }}
{% endmacro %}

{% macro _cdc_columns(columns, key) %}
    {#- The columns with all options: a mapping from the name to {type, from, unit}. -#}
    {%- do lakehouse_patterns.require(
        columns is mapping and columns | length > 0,
        'columns must map the names of the columns to their types, got ' ~ columns
    ) -%}
    {%- set own = lakehouse_patterns._cdc_own_columns() -%}
    {%- set complete = {} -%}
    {%- for name, given in columns.items() -%}
        {%- set column = {'type': given} if given is string else given -%}
        {%- do lakehouse_patterns.require(
            column is mapping, "column '" ~ name ~ "' needs a type or a mapping {type, from, unit}, got " ~ given
        ) -%}
        {%- do lakehouse_patterns.require_known_keys("column '" ~ name ~ "'", column, ['type', 'from', 'unit']) -%}
        {%- do lakehouse_patterns.require(column.type, "column '" ~ name ~ "' has no type") -%}
        {%- do lakehouse_patterns.require(
            name | lower not in own,
            "'" ~ name ~ "' is a column of a change itself: give it another name, and its name in the source as from"
        ) -%}
        {%- do lakehouse_patterns.require_one_of(
            "unit of column '" ~ name ~ "'", column.get('unit', 'microseconds'), ['microseconds', 'milliseconds']
        ) -%}
        {%- do lakehouse_patterns._cdc_require_type(name, column.type | lower | trim) -%}
        {%- do complete.update({name: {
            'type': column.type | trim, 'from': column.get('from', name), 'unit': column.get('unit', 'microseconds')
        }}) -%}
    {%- endfor -%}
    {%- do lakehouse_patterns.require(lakehouse_patterns.as_list(key), 'key must name the columns of the primary key') -%}
    {%- for name in lakehouse_patterns.as_list(key) -%}
        {%- do lakehouse_patterns.require(
            name in complete, "key names '" ~ name ~ "', which is none of the columns " ~ (complete | join(', '))
        ) -%}
    {%- endfor -%}
    {{ return(complete) }}
{% endmacro %}

{% macro _cdc_types() %}
    {#- The types that a column can have, as regular expressions. Nested ones may hold any of them. -#}
    {{ return([
        'string', 'boolean', 'binary', 'date', 'timestamp', 'timestamp_ntz',
        'tinyint|byte', 'smallint|short', 'int|integer', 'bigint|long', 'float|real', 'double',
        '(decimal|dec|numeric)\\(\\s*\\d+\\s*(,\\s*\\d+\\s*)?\\)', '(var)?char\\(\\s*\\d+\\s*\\)',
        'array<.+>', 'map<.+>', 'struct<.+>'
    ]) }}
{% endmacro %}

{% macro _cdc_require_type(name, type) %}
    {#- A type that isn't known would become NULL, or something else than the source has. -#}
    {%- set known = [] -%}
    {%- for pattern in lakehouse_patterns._cdc_types() if modules.re.fullmatch(pattern, type) -%}
        {%- do known.append(pattern) -%}
    {%- endfor -%}
    {%- do lakehouse_patterns.require(
        known,
        "column '" ~ name ~ "' has the type '" ~ type ~ "'; allowed are string, char(n), varchar(n), boolean, tinyint, "
        ~ 'smallint, int, bigint, float, double, decimal with its digits, date, timestamp, timestamp_ntz, binary, array, '
        ~ 'map, struct'
    ) -%}
    {%- if type.startswith('array<') -%}
        {%- do lakehouse_patterns._cdc_require_type(name, type[6:-1] | trim) -%}
    {%- endif -%}
{% endmacro %}
