{#-
    Fast Metadata Cleaner: names of units, a model's options, and which tables there are. The two rules of names are
    those of python_jobs/idempotency/unit_tables.py; a test compares them.
-#}

{% macro unit_name(date, unit) %}
    {{ return(adapter.dispatch('unit_name', 'lakehouse_patterns')(date, unit)) }}
{% endmacro %}


{% macro default__unit_name(date, unit) %}
    {#- A week belongs to the calendar year: ISO weeks with calendar years name the first and the last week alike. -#}
    {%- set formats = {'day': '%Y_%m_%d', 'week': '%Y_%W', 'month': '%Y_%m', 'year': '%Y'} -%}
    {%- do lakehouse_patterns.require_one_of('unit', unit, formats.keys() | list) -%}
    {{ return(lakehouse_patterns._units_date(date).strftime(formats[unit])) }}
{% endmacro %}


{% macro starts_unit(date, unit) %}
    {{ return(adapter.dispatch('starts_unit', 'lakehouse_patterns')(date, unit)) }}
{% endmacro %}


{% macro default__starts_unit(date, unit) %}
    {%- set day = lakehouse_patterns._units_date(date) -%}
    {%- set before = (day - modules.datetime.timedelta(days=1)).isoformat() -%}
    {{ return(lakehouse_patterns.unit_name(date, unit) != lakehouse_patterns.unit_name(before, unit)) }}
{% endmacro %}


{% macro _units_date(date) %}
    {{ return(modules.datetime.date.fromisoformat(lakehouse_patterns.require_date(date))) }}
{% endmacro %}


{% macro _units_options(given) %}
    {%- do lakehouse_patterns.require_pattern_options('fast_metadata_cleaner', given) -%}
    {%- set options = {'unit': given.get('unit', 'week'), 'clean': given.get('clean', 'truncate')} -%}
    {%- do lakehouse_patterns.require_one_of('unit', options.unit, ['day', 'week', 'month', 'year']) -%}
    {%- do lakehouse_patterns.require_one_of('clean', options.clean, ['truncate', 'drop']) -%}
    {{ return(options) }}
{% endmacro %}


{% macro _units_of_model(model_name) %}
    {#- {node, view, options, tables} of a model, for an operation. -#}
    {%- set node = lakehouse_patterns.model_of(model_name, 'unit_tables', 'units belong to') -%}
    {%- set view = lakehouse_patterns.relation_of(node, 'view') -%}
    {{ return({
        'node': node,
        'view': view,
        'options': lakehouse_patterns._units_options(
            lakehouse_patterns.options_of(node, 'fast_metadata_cleaner') or {}
        ),
        'tables': lakehouse_patterns._units_tables(view),
    }) }}
{% endmacro %}


{% macro _units_tables(view) %}
    {#-
        Our tables of a view, in order, by their names without its name: {relation, units that they hold, is_frozen}.
        A table that something else made has no such properties; one of ours says which view it belongs to.
    -#}
    {%- set tables = {} -%}
    {%- for name, relation in lakehouse_patterns.names_like(view).items()
        if modules.re.fullmatch('(frozen_\\w+|\\d{4}(_\\d{2}){0,2})', name) -%}
        {%- set properties = lakehouse_patterns.table_properties(relation) -%}
        {%- if properties.get('lakehouse_patterns.unit_tables.view') == view.identifier -%}
            {%- do tables.update({name: {
                'relation': relation,
                'units': properties['lakehouse_patterns.unit_tables.units'].split(','),
                'is_frozen': 'delta.appendOnly' in properties,
            }}) -%}
        {%- endif -%}
    {%- endfor -%}
    {{ return(tables) }}
{% endmacro %}


{% macro _units_table(view, unit) %}
    {{ return(lakehouse_patterns.relation_beside(view, '_' ~ unit)) }}
{% endmacro %}


{% macro _units_require_past(date) %}
    {%- do lakehouse_patterns.require(
        lakehouse_patterns._units_date(date).isoformat() <= run_started_at.strftime('%Y-%m-%d'),
        'the day ' ~ date ~ ' is in the future: there is nothing to load yet'
    ) -%}
{% endmacro %}


{% macro _units_require_known(units, names) %}
    {%- for name in names -%}
        {%- do lakehouse_patterns.require(
            name is string, 'a unit is a text: quote it, YAML reads 2023_45 as the number 202345'
        ) -%}
        {%- do lakehouse_patterns.require(
            name in units.tables,
            units.view ~ " has no unit '" ~ name ~ "'; it has: " ~ (units.tables | join(', ') or 'none')
        ) -%}
    {%- endfor -%}
{% endmacro %}


{% macro _units_require_not_frozen(tables, unit) %}
    {%- for name, table in tables.items() if table.is_frozen -%}
        {%- do lakehouse_patterns.require(
            unit not in table.units and unit != name,
            unit ~ ' is frozen in ' ~ table.relation ~ ': its rows do not change any more'
        ) -%}
    {%- endfor -%}
{% endmacro %}
