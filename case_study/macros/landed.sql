{% macro landed(source_name, table_name) %}
    {#-
        A landing folder may lack a feed. Until a feed's job has created its table, the macro returns no rows with the
        columns that the source's YAML declares, so that every model can be built, tested and documented.
    -#}
    {%- set relation = source(source_name, table_name) -%}
    {%- if not execute
        or adapter.get_relation(relation.database, relation.schema, relation.identifier) is not none -%}
        {{ return(relation) }}
    {%- endif -%}
    {%- set columns = [] -%}
    {%- for node in graph.sources.values() if node.source_name == source_name and node.name == table_name -%}
        {%- for column in node.columns.values() -%}
            {%- set missing = 'cast(null as ' ~ column.data_type ~ ')' -%}
            {%- if '<' in column.data_type -%}
                {#- sqlfluff doesn't know the names of a struct's fields in a cast. -#}
                {%- set missing = "get(from_json(cast(null as string), 'array<" ~ column.data_type ~ ">'), 0)" -%}
            {%- endif -%}
            {%- do columns.append(missing ~ ' as ' ~ adapter.quote(column.name)) -%}
        {%- endfor -%}
    {%- endfor -%}
    {{ return('(select ' ~ columns | join(', ') ~ ' where false)') }}
{% endmacro %}
