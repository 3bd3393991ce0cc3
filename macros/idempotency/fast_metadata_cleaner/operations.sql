{#- Fast Metadata Cleaner: operations on the units of a model, and the statements that loads use as well. -#}

{% macro create_unit(model_name, date, columns=none) %}
    {{ return(adapter.dispatch('create_unit', 'lakehouse_patterns')(model_name, date, columns)) }}
{% endmacro %}


{% macro default__create_unit(model_name, date, columns) %}
    {%- if execute -%}
        {%- set units = lakehouse_patterns._units_of_model(model_name) -%}
        {%- do lakehouse_patterns._units_require_past(date) -%}
        {%- set unit = lakehouse_patterns.unit_name(date, units.options.unit) -%}
        {%- do lakehouse_patterns._units_require_not_frozen(units.tables, unit) -%}
        {%- if unit not in units.tables -%}
            {%- set newest = units.tables.values() | rejectattr('is_frozen') | map(attribute='relation') | list -%}
            {%- do lakehouse_patterns.require(
                columns or newest,
                'the first unit of ' ~ units.view ~ ' needs columns, such as "id bigint, page string"'
            ) -%}
            {%- do lakehouse_patterns._units_create(
                units.view,
                unit,
                '(' ~ columns ~ ', unit_day date)' if columns else 'as select * from ' ~ newest[-1] ~ ' where false',
                configuration=units.node.config
            ) -%}
        {%- endif -%}
        {%- do lakehouse_patterns._units_expose(
            units.view, lakehouse_patterns._units_tables(units.view), units.node
        ) -%}
    {%- endif -%}
{% endmacro %}


{% macro clean_unit(model_name, unit) %}
    {{ return(adapter.dispatch('clean_unit', 'lakehouse_patterns')(model_name, unit)) }}
{% endmacro %}


{% macro default__clean_unit(model_name, unit) %}
    {%- if execute -%}
        {%- set units = lakehouse_patterns._units_of_model(model_name) -%}
        {%- do lakehouse_patterns._units_require_known(units, [unit]) -%}
        {%- do lakehouse_patterns._units_require_not_frozen(units.tables, unit) -%}
        {%- do run_query(lakehouse_patterns._units_clean_sql(units.tables[unit].relation)) -%}
    {%- endif -%}
{% endmacro %}


{% macro drop_unit(model_name, unit) %}
    {{ return(adapter.dispatch('drop_unit', 'lakehouse_patterns')(model_name, unit)) }}
{% endmacro %}


{% macro default__drop_unit(model_name, unit) %}
    {%- if execute -%}
        {%- set units = lakehouse_patterns._units_of_model(model_name) -%}
        {%- do lakehouse_patterns._units_require_known(units, [unit]) -%}
        {%- do lakehouse_patterns._units_drop(units.view, units.tables, [unit], units.node) -%}
    {%- endif -%}
{% endmacro %}


{% macro add_unit_column(model_name, column, type) %}
    {{ return(adapter.dispatch('add_unit_column', 'lakehouse_patterns')(model_name, column, type)) }}
{% endmacro %}


{% macro default__add_unit_column(model_name, column, type) %}
    {%- if execute -%}
        {%- set units = lakehouse_patterns._units_of_model(model_name) -%}
        {%- for table in units.tables.values() -%}
            {%- set stored = lakehouse_patterns.column_types(table.relation) -%}
            {%- if lakehouse_patterns.column_name(stored, column) is none -%}
                {%- do lakehouse_patterns.add_columns(table.relation, stored, {column: type}) -%}
            {%- endif -%}
        {%- endfor -%}
        {%- do lakehouse_patterns._units_expose(units.view, units.tables, units.node) -%}
    {%- endif -%}
{% endmacro %}


{% macro _units_create(view, unit, columns, units=none, configuration={}) %}
    {%- set relation = lakehouse_patterns._units_table(view, unit) -%}
    {%- do lakehouse_patterns.require(
        not lakehouse_patterns.is_in_catalog(relation),
        relation ~ ' is there and was not made by unit_tables: rename or drop it'
    ) -%}
    {%- set own = {
        'lakehouse_patterns.unit_tables.view': view.identifier,
        'lakehouse_patterns.unit_tables.units': (units or [unit]) | join(',')
    } -%}
    {%- do own.update({'delta.appendOnly': 'true'}) if units -%}
    {%- set clauses = lakehouse_patterns.table_clauses(configuration, own) -%}
    {%- set parts = [columns, clauses] if columns.startswith('(') else [clauses, columns] -%}
    {%- do run_query('create table ' ~ relation ~ ' ' ~ (parts | join(' '))) -%}
{% endmacro %}


{% macro _units_clean_sql(relation) %}
    {#- Without a condition Delta removes whole files by their names. TRUNCATE is not there in each of its releases. -#}
    {{ return('delete from ' ~ relation) }}
{% endmacro %}


{% macro _units_drop(view, tables, units, node=none) %}
    {#- From the view first: a reader between the two statements gets the other units and no error. -#}
    {%- set others = {} -%}
    {%- for name, table in tables.items() if name not in units -%}
        {%- do others.update({name: table}) -%}
    {%- endfor -%}
    {%- do lakehouse_patterns._units_expose(view, others, node) -%}
    {%- for unit in units -%}
        {%- do run_query('drop table ' ~ lakehouse_patterns._units_table(view, unit)) -%}
    {%- endfor -%}
{% endmacro %}
