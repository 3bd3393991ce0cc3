{#- The columns that a user declares: their names, types and options, checked while the model is compiled. -#}

{% macro _cdc_own_columns() %}
    {{ return([
        'record', 'ingested_at', 'op', 'lsn', 'transaction_id', 'transaction_order', 'changed_at', 'is_deleted',
        'error_class', 'error_message'
    ]) }}
{% endmacro %}

{% macro _cdc_columns(columns, key) %}
    {#- The columns with all options: a mapping from the name to {type, from, unit, tree}, the type as a tree. -#}
    {%- do lakehouse_patterns.require(
        columns is mapping and columns | length > 0,
        'columns must map the names of the columns to their types, got ' ~ columns
    ) -%}
    {%- set own = lakehouse_patterns._cdc_own_columns() -%}
    {%- set complete, sources = {}, {} -%}
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
        {%- set source = column.get('from', name) -%}
        {%- do lakehouse_patterns.require(
            lakehouse_patterns.column_name(complete, name) is none
            and sources.setdefault(source | lower, source) == source,
            "column '" ~ name ~ "' or its name in the source differs from another only in the case of its letters, "
            ~ 'which Spark does not tell apart: leave one of them out'
        ) -%}
        {%- do complete.update({name: {
            'type': column.type | trim, 'from': source, 'unit': column.get('unit', 'microseconds'),
            'tree': lakehouse_patterns._cdc_type(name, column.type | trim)
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

{% macro _cdc_type(name, type) %}
    {#-
        A type as a tree: of one value {kind, type}, {kind: array, item}, {kind: map, value} or {kind: struct, fields} with
        the name and the type of each field. A type that isn't known would become NULL, or something else than the
        source has.
    -#}
    {%- set masked, quoted = namespace(text=''), [] -%}
    {%- for part in modules.re.split('`((?:[^`]|``)+)`', type) -%}
        {%- if loop.index0 is odd -%}
            {%- set masked.text = masked.text ~ '`' ~ (quoted | length) ~ '`' -%}
            {%- do quoted.append(part | replace('``', '`')) -%}
        {%- else -%}
            {%- set masked.text = masked.text ~ part -%}
        {%- endif -%}
    {%- endfor -%}
    {%- set tree = lakehouse_patterns._cdc_type_tree(masked.text, quoted) -%}
    {%- do lakehouse_patterns.require(
        tree is not none,
        "column '" ~ name ~ "' has the type '" ~ type ~ "'; allowed are string, char(n), varchar(n), boolean, tinyint, "
        ~ 'smallint, int, bigint, float, double, decimal with its digits (up to 38) and no more decimals than these, date, '
        ~ 'timestamp, timestamp_ntz, binary, and of these array<...>, map<string,...> and struct<...>, whose fields have '
        ~ 'a name of their own and a type each'
    ) -%}
    {{ return(tree) }}
{% endmacro %}

{% macro _cdc_type_tree(type, quoted) %}
    {#- None for what is no type. A quoted name stands as the number of its place in the list `quoted`. -#}
    {%- set nested = modules.re.fullmatch('(?is)\\s*(array|map|struct)\\s*<(.*)>\\s*', type) -%}
    {%- if not nested -%}
        {{ return(lakehouse_patterns._cdc_type_of_one_value(type | lower | trim)) }}
    {%- endif -%}
    {%- set kind, parts = nested.group(1) | lower, lakehouse_patterns._replica_split(nested.group(2)) -%}
    {%- if kind == 'struct' -%}
        {{ return(lakehouse_patterns._cdc_struct_type(parts, quoted)) }}
    {%- endif -%}
    {%- set tree = lakehouse_patterns._cdc_type_tree(parts[-1], quoted) -%}
    {%- if tree is none -%}
        {{ return(none) }}
    {%- elif kind == 'array' and parts | length == 1 -%}
        {{ return({'kind': kind, 'item': tree}) }}
    {%- elif kind == 'map' and parts | length == 2 and parts[0] | lower | trim == 'string' -%}
        {{ return({'kind': kind, 'value': tree}) }}
    {%- endif -%}
    {{ return(none) }}
{% endmacro %}

{% macro _cdc_struct_type(parts, quoted) %}
    {%- set fields, names = [], [] -%}
    {%- for part in parts -%}
        {%- set field = modules.re.fullmatch('(?s)\\s*(?:`(\\d+)`|(\\w+))\\s*[:\\s](.+)', part) -%}
        {%- set tree = lakehouse_patterns._cdc_type_tree(field.group(3), quoted) if field else none -%}
        {%- if not tree -%}
            {{ return(none) }}
        {%- endif -%}
        {%- set name = field.group(2) or quoted[field.group(1) | int] -%}
        {%- if name | lower in names -%}
            {{ return(none) }}
        {%- endif -%}
        {%- do names.append(name | lower) -%}
        {%- do fields.append({'name': name, 'type': tree}) -%}
    {%- endfor -%}
    {{ return({'kind': 'struct', 'fields': fields}) }}
{% endmacro %}

{% macro _cdc_type_of_one_value(type) %}
    {%- set known = 'string|boolean|binary|date|timestamp|timestamp_ntz|tinyint|byte|smallint|short|int|integer|bigint|long'
        ~ '|float|real|double|(var)?char\\(\\s*\\d+\\s*\\)|(decimal|dec|numeric)\\(\\s*\\d+\\s*(,\\s*\\d+\\s*)?\\)' -%}
    {%- if not modules.re.fullmatch(known, type) -%}
        {{ return(none) }}
    {%- endif -%}
    {%- set kind, digits = modules.re.match('\\w+', type).group(), modules.re.findall('\\d+', type) | map('int') | list -%}
    {%- if kind in ('decimal', 'dec', 'numeric') and not (digits[-1] <= digits[0] and 1 <= digits[0] <= 38) -%}
        {{ return(none) }}
    {%- endif -%}
    {{ return({'kind': kind, 'type': type}) }}
{% endmacro %}
