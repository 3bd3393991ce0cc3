{#-
    The clauses of dbt-spark's CREATE TABLE that hold a user's names and texts. dbt-spark neither quotes the names nor
    escapes the texts: `partition_by: Order Id` and the folder `it's` are errors of syntax. A model that asks for no
    pattern gets the clauses of the adapter that runs.
-#}

{% macro asks_for_a_pattern() %}
    {{ return(
        config.get('materialized') in lakehouse_patterns.supported_configs()
        or lakehouse_patterns.options('merger') is not none
    ) }}
{% endmacro %}


{% macro spark__partition_cols(label, required=false) %}
    {%- if not lakehouse_patterns.asks_for_a_pattern() -%}
        {{ return(lakehouse_patterns.adapter_macro('partition_cols')(label, required)) }}
    {%- endif -%}
    {%- set names = lakehouse_patterns.quoted_names(lakehouse_patterns.as_list(config.get('partition_by'))) -%}
    {{ return(label ~ ' (' ~ (names | join(', ')) ~ ')' if names else '') }}
{% endmacro %}


{% macro spark__tblproperties_clause() %}
    {#- Other adapters pass arguments of their own. -#}
    {%- if not lakehouse_patterns.asks_for_a_pattern() -%}
        {{ return(lakehouse_patterns.adapter_macro('tblproperties_clause')(*varargs, **kwargs)) }}
    {%- endif -%}
    {{ return(lakehouse_patterns.property_list(config.get('tblproperties') or {})) }}
{% endmacro %}


{% macro spark__location_clause() %}
    {%- if not lakehouse_patterns.asks_for_a_pattern() -%}
        {{ return(lakehouse_patterns.adapter_macro('location_clause')(*varargs, **kwargs)) }}
    {%- endif -%}
    {%- set root = config.get('location_root') -%}
    {{ return('location ' ~ lakehouse_patterns.text_literal(root ~ '/' ~ model.alias) if root else '') }}
{% endmacro %}


{% macro property_list(properties) %}
    {%- set pairs = [] -%}
    {%- for name, value in properties.items() -%}
        {%- do pairs.append(
            lakehouse_patterns.text_literal(name) ~ ' = ' ~ lakehouse_patterns.text_literal(value)
        ) -%}
    {%- endfor -%}
    {{ return('tblproperties (\n    ' ~ (pairs | join(',\n    ')) ~ '\n)' if pairs else '') }}
{% endmacro %}
