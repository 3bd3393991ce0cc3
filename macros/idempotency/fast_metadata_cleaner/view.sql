{#- Fast Metadata Cleaner: the view that readers use. -#}

{% macro _units_expose(view, tables, node=none) %}
    {#- Frozen rows are shown from the frozen table alone, even if the tables of their units are not dropped yet. -#}
    {%- set frozen = tables.values() | selectattr('is_frozen') | map(attribute='units') | sum(start=[]) -%}
    {%- set shown = [] -%}
    {%- for name, table in tables.items() if table.is_frozen or name not in frozen -%}
        {%- do shown.append(table.relation) -%}
    {%- endfor -%}
    {%- set union = lakehouse_patterns._units_by_name(shown) -%}
    {%- do union.columns.pop('unit_day', none) -%}
    {%- if not shown and lakehouse_patterns.is_in_catalog(view) -%}
        {%- do union.columns.update(lakehouse_patterns.column_types(view)) -%}
    {%- endif -%}
    {%- if union.columns -%}
        {%- do run_query(lakehouse_patterns._units_view_sql(view, union, node)) -%}
    {%- endif -%}
{% endmacro %}


{% macro _units_by_name(relations) %}
    {#- {columns of all the tables by name to type, tables: [{relation, types}]} -#}
    {%- set columns, sources, tables = {}, {}, [] -%}
    {%- for relation in relations -%}
        {%- set types = lakehouse_patterns.column_types(relation) -%}
        {%- for name, type in types.items() -%}
            {%- set known = lakehouse_patterns.column_name(columns, name) or name -%}
            {%- do lakehouse_patterns.require(
                columns.get(known, type) == type,
                relation ~ ' has ' ~ name ~ ' as ' ~ type ~ ', ' ~ sources.get(known) ~ ' as '
                ~ columns.get(known) ~ ': load one of the units again, or alter its table'
            ) -%}
            {%- do columns.setdefault(known, type) -%}
            {%- do sources.setdefault(known, relation) -%}
        {%- endfor -%}
        {%- do tables.append({'relation': relation, 'types': types}) -%}
    {%- endfor -%}
    {{ return({'columns': columns, 'tables': tables}) }}
{% endmacro %}


{% macro _units_view_sql(view, union, node=none) %}
create or replace view {{ view }}
{{ lakehouse_patterns.view_comments(node, union.columns) if node }}
as
{{ lakehouse_patterns._units_union_sql(union) }}
{%- endmacro %}


{% macro _units_union_sql(union) %}
{%- for table in union.tables %}
select
    {{ lakehouse_patterns.selected_as_stored(union.columns, table.types) | join(',\n    ') }}
from {{ table.relation }}
{{ 'union all' if not loop.last }}
{%- else %}
{{ lakehouse_patterns.no_rows_sql(union.columns) }}
{%- endfor %}
{%- endmacro %}
