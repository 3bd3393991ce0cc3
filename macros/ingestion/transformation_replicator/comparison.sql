{#- The columns of a relation compared with its contract. -#}

{% macro _replica_unknown(relation, root) %}
    {#- The relation's columns and fields that the contract doesn't list; none for an absent relation. -#}
    {#- dbt's cache of relations isn't used, because it lacks relations that other programs created later. -#}
    {%- set fields = lakehouse_patterns.column_types(relation).items() | list -%}
    {%- if not fields -%}
        {{ return([]) }}
    {%- endif -%}
    {{ return(lakehouse_patterns._replica_compare(root, fields, '') | sort) }}
{% endmacro %}

{% macro _replica_compare(node, fields, prefix) %}
    {%- set unknown, types = [], {} -%}
    {%- for name, type in fields -%}
        {%- do lakehouse_patterns.require(
            name | lower not in types, prefix ~ name ~ ' is there twice in the source, spelled in different cases'
        ) -%}
        {%- do types.update({name | lower: type}) -%}
        {%- if name | lower not in node.children -%}
            {%- do unknown.append(prefix ~ name) -%}
        {%- endif -%}
    {%- endfor -%}
    {%- for name, child in node.children.items() -%}
        {%- do lakehouse_patterns.require(
            name in types,
            'the contract names ' ~ prefix ~ child.name ~ ", which the source doesn't have; it has "
            ~ (fields | map('first') | join(', '))
        ) -%}
        {%- do unknown.extend(lakehouse_patterns._replica_compare_type(child, types[name], prefix ~ child.name)) -%}
    {%- endfor -%}
    {{ return(unknown) }}
{% endmacro %}

{% macro _replica_compare_type(node, type, path) %}
    {%- if not node.children and node['keys'] is none and not lakehouse_patterns._replica_leaves(node) -%}
        {{ return([]) }}
    {%- endif -%}
    {%- do lakehouse_patterns.require(
        not node.transform or lakehouse_patterns._replica_is_atomic(type),
        path ~ ' is a ' ~ type ~ ': the contract can only transform what is in it'
    ) -%}
    {%- set inner = type[type.find('<') + 1:-1] -%}
    {%- if type.startswith('struct<') -%}
        {%- do lakehouse_patterns.require(
            node.children, path ~ ' is a struct: the contract must list its fields, such as ' ~ path ~ '.name'
        ) -%}
        {{ return(lakehouse_patterns._replica_compare(node, lakehouse_patterns._replica_fields(type), path ~ '.')) }}
    {%- elif type.startswith('array<') -%}
        {%- if not node.children and lakehouse_patterns._replica_is_atomic(inner) -%}
            {{ return([]) }}
        {%- endif -%}
        {%- do lakehouse_patterns.require(
            node.children | list == ['element'],
            path ~ ' is an array: the contract must list its elements, as ' ~ path ~ '.element'
        ) -%}
        {{ return(lakehouse_patterns._replica_compare_type(node.children.element, inner, path ~ '.element')) }}
    {%- elif type.startswith('map<') -%}
        {%- do lakehouse_patterns.require(
            node['keys'] is not none, path ~ ' is a map: the contract must list the keys that may leave, as keys: […]'
        ) -%}
        {%- set value = (lakehouse_patterns._replica_split(inner))[1:] | join(',') -%}
        {%- do lakehouse_patterns.require(
            lakehouse_patterns._replica_is_atomic(lakehouse_patterns._replica_split(inner)[0]),
            path ~ " is a map whose keys are no texts or numbers: it can't be replicated"
        ) -%}
        {%- do lakehouse_patterns.require(
            node.children | list == ['value']
            or (not node.children and lakehouse_patterns._replica_is_atomic(value)),
            path ~ ' is a map: the contract must list the fields of its values, as ' ~ path ~ '.value'
        ) -%}
        {%- if node.children -%}
            {{ return(lakehouse_patterns._replica_compare_type(node.children.value, value, path ~ '.value')) }}
        {%- endif -%}
    {%- else -%}
        {%- do lakehouse_patterns.require(
            not node.children and node['keys'] is none,
            path ~ ' is a ' ~ type ~ ': it has no fields that the contract could list'
        ) -%}
        {%- do lakehouse_patterns.require(
            type != 'variant', path ~ " is a variant, which may hold anything: it can't be replicated"
        ) -%}
    {%- endif -%}
    {{ return([]) }}
{% endmacro %}

{% macro _replica_is_atomic(type) %}
    {{ return('<' not in type and type != 'variant') }}
{% endmacro %}
