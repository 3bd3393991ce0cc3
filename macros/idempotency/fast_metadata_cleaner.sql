{#-
    Fast Metadata Cleaner: one dataset in many tables, each of one unit of time, behind one view.

    `materialized='unit_tables'` loads the run's day into the table of its unit, `<model>_2024_46`. On the first day of
    a unit the table is cleaned first, by an operation that reads no data file; the other days only append. So a whole
    unit is loaded again by running its days in order from the first, and nothing less than a unit can be.

    An append repeats what it appended before. So each row keeps the day of its load, `unit_day`, and a day that the
    unit holds already is refused, by a look at the file statistics. Two runs of one day at once: the second commit
    fails, or Delta skips it by its transaction number and the run finds that out.

    Whatever has the name of a unit's table but not our properties was made by another hand: nothing cleans it.
    The tables are managed ones, whatever `location_root` says: dropping an external table leaves its files.
-#}

{% materialization unit_tables, adapter='spark', supported_languages=['sql'] %}
    {%- set options = lakehouse_patterns._units_options(lakehouse_patterns.options('fast_metadata_cleaner') or {}) -%}
    {%- set existing_relation = load_relation(this) -%}
    {%- do lakehouse_patterns.require(
        existing_relation is none or existing_relation.is_view,
        this ~ ' is a table: rename or drop it, unit_tables is a view over the tables of its units'
    ) -%}
    {%- do lakehouse_patterns.refuse_full_refresh('unit_tables') -%}
    {{ run_hooks(pre_hooks) }}

    {%- set batch = lakehouse_patterns.batch_view(this) -%}
    {%- call statement('create_batch_view') -%}
        {{ create_temporary_view(batch, compiled_code) }}
    {%- endcall -%}
    {%- set date = lakehouse_patterns.logical_date() -%}
    {%- set target = lakehouse_patterns._units_prepare(this, options, date, batch) -%}
    {%- call statement('main') -%}
        {{ lakehouse_patterns._units_load_sql(target, date, batch, invocation_id) }}
    {%- endcall -%}
    {%- do lakehouse_patterns._units_require_commit(target, invocation_id) -%}

    {%- do apply_grants(this, config.get('grants'), should_revoke(existing_relation, false)) -%}
    {{ run_hooks(post_hooks) }}
    {{ return({'relations': [this.incorporate(type='view')]}) }}
{% endmaterialization %}


{#- Units of time: the two rules of python_jobs/idempotency/unit_tables.py; a test compares them ------------------ -#}

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
    {{ return(modules.datetime.date.fromisoformat(lakehouse_patterns._full_loader_date(date))) }}
{% endmacro %}


{#- Operations ------------------------------------------------------------------------------------------------- -#}

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
                '(' ~ columns ~ ', unit_day date)' if columns else 'as select * from ' ~ newest[-1] ~ ' where false'
            ) -%}
        {%- endif -%}
        {%- do lakehouse_patterns._units_expose(units.view, lakehouse_patterns._units_tables(units.view)) -%}
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
        {%- do lakehouse_patterns._units_drop(units.view, units.tables, [unit]) -%}
    {%- endif -%}
{% endmacro %}

{% macro freeze_units(model_name, units, into) %}
    {{ return(adapter.dispatch('freeze_units', 'lakehouse_patterns')(model_name, units, into)) }}
{% endmacro %}

{% macro default__freeze_units(model_name, units, into) %}
    {%- if execute -%}
        {%- set found = lakehouse_patterns._units_of_model(model_name) -%}
        {%- do lakehouse_patterns._units_freeze(found, units, into) -%}
    {%- endif -%}
{% endmacro %}

{% macro add_unit_column(model_name, column, type) %}
    {{ return(adapter.dispatch('add_unit_column', 'lakehouse_patterns')(model_name, column, type)) }}
{% endmacro %}

{% macro default__add_unit_column(model_name, column, type) %}
    {%- if execute -%}
        {%- set units = lakehouse_patterns._units_of_model(model_name) -%}
        {%- for table in units.tables.values() -%}
            {%- if column not in adapter.get_columns_in_relation(table.relation) | map(attribute='name') -%}
                {%- do run_query(
                    'alter table ' ~ table.relation ~ ' add columns (' ~ adapter.quote(column) ~ ' ' ~ type ~ ')'
                ) -%}
            {%- endif -%}
        {%- endfor -%}
        {%- do lakehouse_patterns._units_expose(units.view, units.tables) -%}
    {%- endif -%}
{% endmacro %}


{#- Options and what there is ----------------------------------------------------------------------------------- -#}

{% macro _units_options(given) %}
    {%- do lakehouse_patterns.require_known_keys('fast_metadata_cleaner', given, ['unit', 'clean']) -%}
    {%- set options = {'unit': given.get('unit', 'week'), 'clean': given.get('clean', 'truncate')} -%}
    {%- do lakehouse_patterns.require_one_of('unit', options.unit, ['day', 'week', 'month', 'year']) -%}
    {%- do lakehouse_patterns.require_one_of('clean', options.clean, ['truncate', 'drop']) -%}
    {{ return(options) }}
{% endmacro %}


{% macro _units_of_model(model_name) %}
    {#- {view, options, tables} of a model, for an operation. -#}
    {%- set nodes = graph.nodes.values()
        | selectattr('resource_type', 'equalto', 'model') | selectattr('name', 'equalto', model_name) | list -%}
    {%- do lakehouse_patterns.require(
        nodes and nodes[0].config.materialized == 'unit_tables',
        "units belong to a model with materialized='unit_tables', got '" ~ model_name ~ "'"
    ) -%}
    {%- set meta = (nodes[0].config.get('meta') or {}).get('lakehouse_patterns') or {} -%}
    {%- set view = api.Relation.create(schema=nodes[0].schema, identifier=nodes[0].alias, type='view') -%}
    {{ return({
        'view': view,
        'options': lakehouse_patterns._units_options(meta.get('fast_metadata_cleaner') or {}),
        'tables': lakehouse_patterns._units_tables(view),
    }) }}
{% endmacro %}


{% macro _units_tables(view) %}
    {#-
        Our tables of a view, in order, by their names without its name: {relation, units that they hold, is_frozen}.
        A table of another hand has no such properties; one of ours says which view it belongs to.
    -#}
    {%- set tables = {} -%}
    {%- set found = run_query("show tables in " ~ view.schema ~ " like '" ~ view.identifier ~ "_*'") -%}
    {%- for identifier in found.columns[1].values() | sort -%}
        {%- set relation = view.incorporate(path={'identifier': identifier}, type='table') -%}
        {%- set name = identifier[view.identifier | length + 1:] -%}
        {%- if modules.re.fullmatch('(frozen_\\w+|\\d{4}(_\\d{2}){0,2})', name) -%}
            {%- set properties = {} -%}
            {%- for property in run_query('show tblproperties ' ~ relation).rows -%}
                {%- do properties.update({property[0]: property[1]}) -%}
            {%- endfor -%}
            {%- if properties.get('lakehouse_patterns.unit_tables.view') == view.identifier -%}
                {%- do tables.update({name: {
                    'relation': relation,
                    'units': properties['lakehouse_patterns.unit_tables.units'].split(','),
                    'is_frozen': 'delta.appendOnly' in properties,
                }}) -%}
            {%- endif -%}
        {%- endif -%}
    {%- endfor -%}
    {{ return(tables) }}
{% endmacro %}


{% macro _units_table(view, unit) %}
    {{ return(view.incorporate(path={'identifier': view.identifier ~ '_' ~ unit}, type='table')) }}
{% endmacro %}


{% macro _units_exists(relation) %}
    {#- Asked of the catalog: dbt's cache doesn't know what the statements here make and drop. -#}
    {%- set found = run_query("show tables in " ~ relation.schema ~ " like '" ~ relation.identifier ~ "'") -%}
    {{ return(found.rows | length > 0) }}
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


{#- Loading a day ----------------------------------------------------------------------------------------------- -#}

{% macro _units_prepare(view, options, date, batch) %}
    {#-
        The exclusive choice: a unit's first day initialises its table, any other day goes straight to the load. Returns
        the table that the day belongs to, and its version.
    -#}
    {%- do lakehouse_patterns._units_require_past(date) -%}
    {%- set unit = lakehouse_patterns.unit_name(date, options.unit) -%}
    {%- set tables = lakehouse_patterns._units_tables(view) -%}
    {%- set relation = lakehouse_patterns._units_table(view, unit) -%}
    {%- do lakehouse_patterns._units_require_not_frozen(tables, unit) -%}
    {%- set starts = lakehouse_patterns.starts_unit(date, options.unit) -%}
    {%- if starts or not tables -%}
        {%- do lakehouse_patterns._units_initialise(view, options, tables, unit, batch) -%}
    {%- endif -%}
    {%- do lakehouse_patterns.require(
        starts or not tables or unit in tables,
        'unit ' ~ unit ~ ' of ' ~ view ~ ' is not there: load it from its first day on, or make it with create_unit'
    ) -%}
    {%- set version = run_query('describe history ' ~ relation ~ ' limit 1').rows[0]['version'] -%}
    {%- if not starts -%}
        {%- do lakehouse_patterns._units_require_new_day(relation, date) -%}
        {%- do lakehouse_patterns._units_require_columns(relation, batch) -%}
    {%- endif -%}
    {{ return({'relation': relation, 'version': version}) }}
{% endmacro %}


{% macro _units_initialise(view, options, tables, unit, batch) %}
    {%- set relation = lakehouse_patterns._units_table(view, unit) -%}
    {%- if unit in tables and options.clean == 'truncate' -%}
        {%- do lakehouse_patterns._units_require_columns(relation, batch) -%}
        {%- do run_query(lakehouse_patterns._units_clean_sql(relation)) -%}
    {%- else -%}
        {%- if unit in tables -%}
            {%- do lakehouse_patterns._units_drop(view, tables, [unit]) -%}
        {%- endif -%}
        {%- do lakehouse_patterns._units_create(
            view, unit, 'as select *, cast(null as date) as unit_day from ' ~ batch ~ ' where false'
        ) -%}
        {%- do lakehouse_patterns._units_expose(view, lakehouse_patterns._units_tables(view)) -%}
    {%- endif -%}
{% endmacro %}


{% macro _units_create(view, unit, columns, units=none) %}
    {%- set relation = lakehouse_patterns._units_table(view, unit) -%}
    {%- do lakehouse_patterns.require(
        not lakehouse_patterns._units_exists(relation),
        relation ~ ' is there and was not made by unit_tables: rename or drop it'
    ) -%}
    {%- do run_query(
        'create table ' ~ relation
        ~ (' ' ~ columns if columns.startswith('(') else '')
        ~ " using delta tblproperties ('lakehouse_patterns.unit_tables.view' = '" ~ view.identifier ~ "'"
        ~ ", 'lakehouse_patterns.unit_tables.units' = '" ~ (units or [unit]) | join(',') ~ "'"
        ~ (", 'delta.appendOnly' = 'true'" if units else '') ~ ')'
        ~ ('' if columns.startswith('(') else ' ' ~ columns)
    ) -%}
{% endmacro %}


{% macro _units_require_columns(relation, batch) %}
    {%- do lakehouse_patterns.require_same_columns(
        relation,
        adapter.get_columns_in_relation(relation) | rejectattr('name', 'equalto', 'unit_day') | list,
        adapter.get_columns_in_relation(batch)
    ) -%}
{% endmacro %}


{% macro _units_require_new_day(relation, date) %}
    {%- set found = run_query(
        'select 1 from ' ~ relation ~ " where unit_day = date'" ~ date ~ "' limit 1"
    ).rows | length -%}
    {%- do lakehouse_patterns.require(
        found == 0,
        relation ~ ' holds ' ~ date ~ ' already, and loading it again would double its rows: '
        ~ 'load the unit again from its first day on'
    ) -%}
{% endmacro %}


{% macro _units_require_commit(target, note) %}
    {%- set history = run_query('describe history ' ~ target.relation ~ ' limit 20') -%}
    {%- do lakehouse_patterns.require(
        note in history.columns['userMetadata'].values(),
        'another run loaded ' ~ target.relation ~ ' meanwhile; let one run at a time load it'
    ) -%}
{% endmacro %}


{% macro _units_load_sql(target, date, batch, note) %}
insert into {{ target.relation }}
with (
    txnAppId = 'lakehouse_patterns.unit_tables',
    txnVersion = '{{ target.version }}',
    userMetadata = '{{ note }}'
)
by name
select
    *,
    date'{{ date }}' as unit_day
from {{ batch }}
{%- endmacro %}


{% macro _units_clean_sql(relation) %}
    {#- Without a condition Delta removes whole files by their names. TRUNCATE is not there in each of its releases. -#}
    {{ return('delete from ' ~ relation) }}
{% endmacro %}


{% macro _units_drop(view, tables, units) %}
    {#- From the view first: a reader between the two statements gets the other units and no error. -#}
    {%- set others = {} -%}
    {%- for name, table in tables.items() if name not in units -%}
        {%- do others.update({name: table}) -%}
    {%- endfor -%}
    {%- do lakehouse_patterns._units_expose(view, others) -%}
    {%- for unit in units -%}
        {%- do run_query('drop table ' ~ lakehouse_patterns._units_table(view, unit)) -%}
    {%- endfor -%}
{% endmacro %}


{#- The view ---------------------------------------------------------------------------------------------------- -#}

{% macro _units_expose(view, tables) %}
    {#- What a frozen table holds is shown from there alone, whether its units are dropped yet or not. -#}
    {%- set frozen = tables.values() | selectattr('is_frozen') | map(attribute='units') | sum(start=[]) -%}
    {%- set shown = [] -%}
    {%- for name, table in tables.items() if table.is_frozen or name not in frozen -%}
        {%- do shown.append(table.relation) -%}
    {%- endfor -%}
    {%- set union = lakehouse_patterns._units_by_name(shown) -%}
    {%- do union.columns.pop('unit_day', none) -%}
    {%- if not shown and lakehouse_patterns._units_exists(view) -%}
        {%- for column in adapter.get_columns_in_relation(view) -%}
            {%- do union.columns.update({column.name: column.dtype}) -%}
        {%- endfor -%}
    {%- endif -%}
    {%- if union.columns -%}
        {%- do run_query(lakehouse_patterns._units_view_sql(view, union)) -%}
    {%- endif -%}
{% endmacro %}


{% macro _units_by_name(relations) %}
    {#- {columns of all the tables by name to type, tables: [{relation, types}]} -#}
    {%- set columns, sources, tables = {}, {}, [] -%}
    {%- for relation in relations -%}
        {%- set types = {} -%}
        {%- for column in adapter.get_columns_in_relation(relation) -%}
            {%- do lakehouse_patterns.require(
                columns.get(column.name, column.dtype) == column.dtype,
                relation ~ ' has ' ~ column.name ~ ' as ' ~ column.dtype ~ ', ' ~ sources.get(column.name) ~ ' as '
                ~ columns.get(column.name) ~ ': load one of the units again, or alter its table'
            ) -%}
            {%- do types.update({column.name: column.dtype}) -%}
            {%- do columns.setdefault(column.name, column.dtype) -%}
            {%- do sources.setdefault(column.name, relation) -%}
        {%- endfor -%}
        {%- do tables.append({'relation': relation, 'types': types}) -%}
    {%- endfor -%}
    {{ return({'columns': columns, 'tables': tables}) }}
{% endmacro %}


{% macro _units_view_sql(view, union) %}
create or replace view {{ view }}
as
{{ lakehouse_patterns._units_union_sql(union) }}
{%- endmacro %}


{% macro _units_union_sql(union) %}
{%- for table in union.tables or [none] %}
select
    {%- for name, type in union.columns.items() %}
    {% if table is not none and name in table.types -%}
        {{ adapter.quote(name) }}
    {%- else -%}
        cast(null as {{ type }}) as {{ adapter.quote(name) }}
    {%- endif %}
    {{- ',' if not loop.last }}
    {%- endfor %}
{% if table is none -%}
where false
{%- else -%}
from {{ table.relation }}
{%- endif %}
{{ 'union all' if not loop.last }}
{%- endfor %}
{%- endmacro %}


{#- Freezing ---------------------------------------------------------------------------------------------------- -#}

{% macro _units_freeze(found, units, into) %}
    {#-
        Frozen table, view, old tables: in this order. Until the view is made anew it shows the old tables, from then on
        the frozen one. Run again after it died, it goes on where it was.
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
        {%- do lakehouse_patterns._units_create(found.view, name, 'as ' ~ rows, units) -%}
    {%- endif -%}
    {%- set tables = lakehouse_patterns._units_tables(found.view) -%}
    {%- do lakehouse_patterns._units_expose(found.view, tables) -%}
    {%- for unit in units if unit in tables -%}
        {%- do run_query('drop table ' ~ tables[unit].relation) -%}
    {%- endfor -%}
{% endmacro %}
