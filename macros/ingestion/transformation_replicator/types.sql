{#- The fields of Spark's types, read from their text. -#}

{% macro _replica_fields(type) %}
    {#- `struct<a:int,b:array<string>>` as [('a', 'int'), ('b', 'array<string>')]. -#}
    {%- set fields = [] -%}
    {%- for field in lakehouse_patterns._replica_split(type[7:-1]) if field -%}
        {%- do fields.append((field[:field.find(':')], field[field.find(':') + 1:])) -%}
    {%- endfor -%}
    {{ return(fields) }}
{% endmacro %}

{% macro _replica_split(text) %}
    {#- Split at the commas outside brackets. -#}
    {%- set parts, state = [], namespace(depth=0, part='') -%}
    {%- for character in text -%}
        {%- set state.depth = state.depth + (1 if character in '<(' else -1 if character in '>)' else 0) -%}
        {%- if character == ',' and state.depth == 0 -%}
            {%- do parts.append(state.part) -%}
            {%- set state.part = '' -%}
        {%- else -%}
            {%- set state.part = state.part ~ character -%}
        {%- endif -%}
    {%- endfor -%}
    {{ return(parts + [state.part]) }}
{% endmacro %}

{% macro _replica_type_paths(path, type) %}
    {#- The paths of a column and of all fields in it. -#}
    {%- set paths = [path] -%}
    {%- if type.startswith('struct<') -%}
        {%- for name, inner in lakehouse_patterns._replica_fields(type) -%}
            {%- do paths.extend(lakehouse_patterns._replica_type_paths(path ~ '.' ~ name, inner)) -%}
        {%- endfor -%}
    {%- elif type.startswith('array<') -%}
        {%- do paths.extend(lakehouse_patterns._replica_type_paths(path ~ '.element', type[6:-1])) -%}
    {%- elif type.startswith('map<') -%}
        {%- set value = (lakehouse_patterns._replica_split(type[4:-1]))[1:] | join(',') -%}
        {%- do paths.extend(lakehouse_patterns._replica_type_paths(path ~ '.value', value)) -%}
    {%- endif -%}
    {{ return(paths) }}
{% endmacro %}
