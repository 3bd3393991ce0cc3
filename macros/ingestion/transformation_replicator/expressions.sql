{#- The SQL of a column of the replica. -#}

{% macro _replica_expression(node, value, depth) %}
    {#- A value reduced to the fields that may leave; NULL stays NULL. -#}
    {%- set children = [] -%}
    {%- for child in node.children.values() if lakehouse_patterns._replica_leaves(child) -%}
        {%- do children.append(child) -%}
    {%- endfor -%}
    {%- if node['keys'] is not none -%}
        {%- set names = [] -%}
        {%- for key in node['keys'] -%}
            {%- do names.append(lakehouse_patterns.text_literal(key)) -%}
        {%- endfor -%}
        {%- set k, v = 'k' ~ depth, 'v' ~ depth -%}
        {%- set arguments = '(' ~ k ~ ', ' ~ v ~ ') -> ' -%}
        {%- set value = 'map_filter(' ~ value ~ ', ' ~ arguments ~ 'string(' ~ k ~ ') in (' ~ names | join(', ') ~ '))' -%}
        {%- if children -%}
            {%- set inner = lakehouse_patterns._replica_expression(children[0], v, depth + 1) -%}
            {%- set value = 'transform_values(' ~ value ~ ', ' ~ arguments ~ inner ~ ')' -%}
        {%- endif -%}
        {{ return(value) }}
    {%- elif node.children | list == ['element'] -%}
        {%- set e = 'e' ~ depth -%}
        {{ return(
            'transform(' ~ value ~ ', ' ~ e ~ ' -> '
            ~ lakehouse_patterns._replica_expression(children[0], e, depth + 1) ~ ')'
        ) }}
    {%- elif node.children -%}
        {%- set fields = [] -%}
        {%- for child in children -%}
            {%- set field = lakehouse_patterns.quoted_name(child.name, value) -%}
            {%- do fields.append(
                lakehouse_patterns.text_literal(child.name) ~ ', '
                ~ lakehouse_patterns._replica_expression(child, field, depth)
            ) -%}
        {%- endfor -%}
        {{ return('case when ' ~ value ~ ' is not null then named_struct(' ~ fields | join(', ') ~ ') end') }}
    {%- elif node.transform -%}
        {{ return(lakehouse_patterns._replica_transformed(node.transform[0], node.transform[1], value)) }}
    {%- endif -%}
    {{ return(value) }}
{% endmacro %}

{% macro _replica_transformed(kind, argument, value) %}
    {%- set text = 'string(' ~ value ~ ')' -%}
    {%- if kind == 'substring' -%}
        {{ return('substring(' ~ text ~ ', ' ~ argument ~ ')') }}
    {%- elif kind == 'constant' -%}
        {{ return(
            'case when ' ~ value ~ ' is not null then ' ~ lakehouse_patterns.text_literal(argument) ~ ' end'
        ) }}
    {%- endif -%}
    {#-
        HMAC-SHA-256. The executor that holds the row looks up the key, so that compiled SQL, plans and logs hold only
        the key's name. reflect returns the text 'null' for a variable that isn't set.
    -#}
    {%- set key = "reflect('java.lang.System', 'getenv', '" ~ argument ~ "')" -%}
    {{ return(
        'case when ' ~ value ~ ' is null then null when ' ~ key ~ " in ('null', '') then "
        ~ "raise_error('the environment variable " ~ argument ~ ", which holds the key of a keyed_hash, is not set') "
        ~ "else reflect('org.apache.commons.codec.digest.HmacUtils', 'hmacSha256Hex', " ~ key ~ ', ' ~ text ~ ') end'
    ) }}
{% endmacro %}
