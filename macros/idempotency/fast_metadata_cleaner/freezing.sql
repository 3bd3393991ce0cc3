{#- Fast Metadata Cleaner: several units that are over become one table that nothing changes any more. -#}

{% macro freeze_units(model_name, units, into) %}
    {{ return(adapter.dispatch('freeze_units', 'lakehouse_patterns')(model_name, units, into)) }}
{% endmacro %}


{% macro default__freeze_units(model_name, units, into) %}
    {%- if execute -%}
        {%- set found = lakehouse_patterns._units_of_model(model_name) -%}
        {%- do lakehouse_patterns._units_freeze(found, units, into) -%}
    {%- endif -%}
{% endmacro %}


{% macro _units_freeze(found, units, into) %}
    {#-
        Frozen table, view, old tables: in this order. Until the view is recreated it shows the old tables, from then on
        the frozen one. A run after a crash continues where the first one stopped.
    -#}
    {%- set units = units | unique | sort | list -%}
    {%- do lakehouse_patterns.require(
        units and (units + [into]) | select('string') | list == units + [into] and modules.re.fullmatch('\\w+', into),
        'freeze_units needs a list of units and a name of letters and digits, as quoted texts, got ' ~ units
        ~ " and '" ~ into ~ "'"
    ) -%}
    {%- set name = 'frozen_' ~ into -%}
    {%- if name in found.tables -%}
        {%- do lakehouse_patterns.require(
            found.tables[name].units == units,
            found.tables[name].relation ~ ' holds ' ~ (found.tables[name].units | join(', ')) ~ ' already, got '
            ~ (units | join(', '))
        ) -%}
    {%- else -%}
        {%- set this_unit = lakehouse_patterns.unit_name(run_started_at.strftime('%Y-%m-%d'), found.options.unit) -%}
        {%- set relations = [] -%}
        {%- for unit in units -%}
            {%- do lakehouse_patterns._units_require_not_frozen(found.tables, unit) -%}
            {%- do lakehouse_patterns._units_require_known(found, [unit]) -%}
            {%- do lakehouse_patterns.require(
                unit < this_unit, unit ~ ' is not over yet, rows may still come: freeze units before ' ~ this_unit
            ) -%}
            {%- do relations.append(found.tables[unit].relation) -%}
        {%- endfor -%}
        {%- set rows = lakehouse_patterns._units_union_sql(lakehouse_patterns._units_by_name(relations)) -%}
        {%- do lakehouse_patterns._units_create(
            found.view, name, 'as ' ~ rows, units, (found.node or {}).config or {}
        ) -%}
    {%- endif -%}
    {%- set tables = lakehouse_patterns._units_tables(found.view) -%}
    {%- do lakehouse_patterns._units_expose(found.view, tables, found.node) -%}
    {%- for unit in units if unit in tables -%}
        {%- do run_query('drop table ' ~ tables[unit].relation) -%}
    {%- endfor -%}
{% endmacro %}
